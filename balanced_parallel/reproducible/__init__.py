"""The same random numbers, and the same bits, in any layout."""
