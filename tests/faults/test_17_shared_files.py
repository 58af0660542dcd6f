"""Row 17: shared file offsets and one path for all branches, as documented for `process_fork`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ramet import BranchManager, host
from tests.faults.envs import Counter


class Reader(Counter):
    """Reads from a file that it opened before the fork, and notes what it does under a fixed path."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self.notes = f"{directory}/notes"
        self.file = open(f"{directory}/book", "rb", buffering=0)  # noqa: SIM115 - it stays open on purpose

    def act(self, action: Any) -> Any:
        with open(self.notes, "a") as notes:
            notes.write(f"{action} ")
        return self.file.read(3).decode()


async def test_shared_file_offsets_and_paths(tmp_path: Path) -> None:
    """A fork copies memory, not files: branches share the offset of an open file, and one path is one file."""
    (tmp_path / "book").write_bytes(b"onetwosixten")
    async with host(Reader, args=(str(tmp_path),)) as env:
        at, _ = await env.reset()
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", at)
            async with mgr.branches("start", 3) as pairs:
                seen = []
                for number, (branch, below) in enumerate(pairs):
                    seen.append((await branch.step(below, number)).next_state.observation)
                    # The memory is each branch's own.
                    assert (await branch.step(branch.newest_state(), "x")).next_state.metadata.step == 2
    assert seen == ["one", "six", ""]
    assert (tmp_path / "notes").read_text() == "0 x 1 x 2 x "
