"""Parts of other libraries, with the exact loss of this one. Each file imports its library."""
