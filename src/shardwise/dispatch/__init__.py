"""From a call of an operator to its plan, and from the plan to its result."""
