"""Notebooks: a real kernel, driven as Jupyter drives it.

`jupyter_client` leaves an event loop and descriptors of its own in the process that uses it, so each test runs it
in a script of its own.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.helpers import run_script

pytestmark = [
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("ipykernel", "jupyter_client"))),
        reason="needs ipykernel and jupyter_client",
    ),
    pytest.mark.timeout(120),
]

# `cell` runs a cell and gives what it printed; the kernel's own process is `kernel`.
DRIVER = """
import os, queue, signal, sys, textwrap, time
from jupyter_client import KernelManager
from tests.helpers import Process, descendants, open_fds, processes, state, wait_until

manager = KernelManager(kernel_name="python3")
manager.kernel_spec.argv[0] = sys.executable
manager.start_kernel()
client = manager.client()
client.start_channels()
client.wait_for_ready(timeout=60)
kernel = manager.provisioner.process.pid


def send(source):
    return client.execute(textwrap.dedent(source))


def finish(message, *, fails=False, timeout=30):
    printed, error = "", None
    until = time.monotonic() + timeout
    while True:
        said = client.get_iopub_msg(timeout=max(0.0, until - time.monotonic()))
        if said["parent_header"].get("msg_id") != message:
            continue
        kind, content = said["msg_type"], said["content"]
        if kind == "stream":
            printed += content["text"]
        elif kind == "error":
            error = "\\n".join(content["traceback"])
        elif kind == "status" and content["execution_state"] == "idle":
            break
    assert (error is not None) == fails, (printed, error)
    return printed + (error or "")


def cell(source, **options):
    return finish(send(source), **options)


def below():
    return {(p.pid, p.start) for p in descendants(kernel)}


def gone(pids):
    # a zombie of init was an orphan: init reaps it when it likes
    return not pids & {(p.pid, p.start) for p in processes().values() if not (p.state == "Z" and p.ppid == 1)}


def end():
    client.stop_channels()
    manager.shutdown_kernel(now=True)


cell('''
import os, signal, sys, warnings
warnings.simplefilter("error", RuntimeWarning)

class Env:
    def reset(self, *, seed=None, options=None):
        self.way = [seed]
        return State(tuple(self.way)), {}

    def step(self, state, action):
        if action == "hang":
            signal.pause()
        if str(action).startswith("/"):  # a named pipe: wait until somebody writes
            with open(action) as gate:
                gate.read()
        self.way.append(action)
        return StepResult(State(tuple(self.way)))

from ramet import BranchManager, CannotBranch, ForkSafetyWarning, State, StepResult, host
''')
"""


def run_notebook(source: str) -> None:
    finished = run_script(DRIVER + source, timeout=90)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.endswith("done\n"), finished.stdout + finished.stderr


def test_await_at_the_top_level() -> None:
    run_notebook(
        """
cell("env = await host(Env)")  # a class of the notebook; and no ForkSafetyWarning, which would be an error here
cell("state, info = await env.reset(seed=1)")
cell("result = await env.step(state, 'a')")
cell("mgr = BranchManager.create(env)")
cell("await mgr.checkpoint('here', result.next_state)")
printed = cell('''
    async with mgr.branches('here', 10) as pairs:
        results = await mgr.step_all(pairs, range(10))
    print([r.next_state.observation for r in results])
''')
assert printed.strip() == str([(1, "a", i) for i in range(10)]), printed
cell("branch, branch_state = await mgr.branch('here')")
cell("after = await branch.step(branch_state, 'b')")
assert cell("print(after.next_state.observation)") == "(1, 'a', 'b')\\n"
assert "has not been awaited" in cell("e, s = mgr.branch('here')", fails=True)
assert len(below()) == 4, descendants(kernel)  # the warden, the host, the checkpoint, the branch
cell("await mgr.aclose()")
cell("await env.aclose()")
assert not below()
end()
print("done")
"""
    )


def test_the_blocking_api() -> None:
    run_notebook(
        """
cell("from ramet.blocking import BranchManager, host")
cell("env = host(Env)")
cell("state, info = env.reset(seed=1)")
cell("mgr = BranchManager.create(env)")
cell("mgr.checkpoint('here', state)")
cell("branch, branch_state = mgr.branch('here')")
assert cell("print(branch.step(branch_state, 'b').next_state.observation)") == "(1, 'b')\\n"
assert len(below()) == 4, descendants(kernel)
cell("mgr.close(); env.close()")
assert not below()
end()
print("done")
"""
    )


def test_a_live_object_warns() -> None:
    run_notebook(
        """
cell("env = Env(); state, _ = env.reset(seed=1); mgr = BranchManager.create(env)")
said = cell("await mgr.checkpoint('here', state)", fails=True)
assert "ForkSafetyWarning" in said and "async with host(factory) as env" in said, said
assert not below()
cell('''
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ForkSafetyWarning)
        await mgr.checkpoint('here', state)
    branch, branch_state = await mgr.branch('here')
    result = await branch.step(branch_state, 'a')
''')
assert cell("print(result.next_state.observation)") == "(1, 'a')\\n"
cell("await mgr.aclose()")
assert not below()
end()
print("done")
"""
    )


def test_an_interrupt_during_a_step() -> None:
    run_notebook(
        """
def interrupted(source, pid):
    message = send(source)
    wait_until(lambda: asleep(pid), timeout=10)
    manager.interrupt_kernel()
    client.kernel_info()  # with some versions of tornado the kernel notices only when the next request wakes its loop
    said = finish(message, fails=True)
    assert "KeyboardInterrupt" in said or "CancelledError" in said, said


def asleep(pid):
    # in the step: no longer for a message, that is on its socket
    with open(f"/proc/{pid}/wchan") as file:
        where = file.read()
    return state(pid) == "S" and where not in ("", "0") and not any(word in where for word in ("unix", "sock", "recv"))


cell('''
    from ramet import blocking
    env = await host(Env)
    state, _ = await env.reset(seed=1)
    mgr = BranchManager.create(env)
    await mgr.checkpoint('here', state)
    plain = blocking.host(Env)
    plain_state, _ = plain.reset(seed=1)
''')
# A step that hangs in a branch: the branch is ended, and all else goes on.
for _ in range(2):
    cell("branch, branch_state = await mgr.branch('here')")
    interrupted("await branch.step(branch_state, 'hang')", int(cell("print(branch.pid)")))
    cell("await branch.aclose()")
cell("branch, branch_state = await mgr.branch('here')")
assert cell("print((await branch.step(branch_state, 'a')).next_state.observation)") == "(1, 'a')\\n"
assert cell("print((await env.step(state, 'b')).next_state.observation)") == "(1, 'b')\\n"

cell("plain_mgr = blocking.BranchManager.create(plain); plain_mgr.checkpoint('here', plain_state)")
cell("branch, branch_state = plain_mgr.branch('here')")
interrupted("branch.step(branch_state, 'hang')", int(cell("print(branch.pid)")))
cell("branch.close()")
assert cell("print(plain.step(plain_state, 'b').next_state.observation)") == "(1, 'b')\\n"
# A step that goes on in the environment when the agent has given it up: the environment is ahead, and says so.
os.mkfifo("gate")
gate = os.path.abspath("gate")
for source in ("await env.step(state, {gate!r})", "plain.step(plain_state, {gate!r})"):
    name, _, call = source.replace("await ", "").partition(".")
    wait = "await " if source.startswith("await ") else ""
    cell(f"{'state' if wait else 'plain_state'}, _ = {wait}{name}.reset(seed=2)")
    interrupted(source.format(gate=gate), int(cell(f"print({name}.pid)")))
    open(gate, "w").close()
    assert "StaleState" in cell(source.replace("{gate!r}", "'a'"), fails=True)
    cell(f"child, child_state = {wait}{name}.fork()")
    assert cell("print(len(child_state.observation), child_state.observation[0])") == "2 2\\n"
    assert cell(f"print({wait}child.step(child_state, 'b'))").count("'b'") == 1
    assert "(3,)" in cell(f"print({wait}{name}.reset(seed=3))")

cell("plain_mgr.close(); plain.close(); await mgr.aclose(); await env.aclose()")
assert not below()
end()
print("done")
"""
    )


@pytest.mark.parametrize("how", ["SIGKILL", "shutdown"])
def test_the_end_of_the_kernel(how: str) -> None:
    run_notebook(
        """
cell('''
    from ramet import blocking
    env = await host(Env)
    state, _ = await env.reset(seed=1)
    mgr = BranchManager.create(env)
    await mgr.checkpoint('here', state)
    pairs = await mgr.branches('here', 20)
    plain = blocking.host(Env)
    live = BranchManager.create(Env())
    live_state, _ = await live.env.reset(seed=1)
    warnings.simplefilter("ignore")
    await live.checkpoint('here', live_state)
    live_pairs = await live.branches('here', 5)
''')
pids = below()
assert len(pids) == 1 + 1 + 1 + 20 + 2 + 1 + 5, len(pids)
if HOW == "SIGKILL":
    os.kill(kernel, signal.SIGKILL)
else:
    manager.shutdown_kernel()
wait_until(lambda: gone(pids), timeout=2 if HOW == "SIGKILL" else 15)
end()
print("done")
""".replace("HOW", repr(how))
    )
