"""One update traced on fake tensors: every allocation, in order."""
