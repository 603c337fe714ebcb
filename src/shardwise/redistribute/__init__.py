"""Changing layouts: `steps_between(src, dst)` gives the steps, `redistribute_locals` takes them."""

from .explain import Explanation as Explanation
from .explain import explain_redistribute as explain_redistribute
