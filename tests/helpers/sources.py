"""Trees of sources, which several rules for files read."""

import ast
import functools

parse = functools.cache(ast.parse)
