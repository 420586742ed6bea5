"""One module on several devices of one process."""
