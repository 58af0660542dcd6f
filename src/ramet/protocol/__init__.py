"""What agent and branches say to each other, without I/O: values, frames and conversations."""
