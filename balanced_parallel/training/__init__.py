"""One effective batch, one exact update."""
