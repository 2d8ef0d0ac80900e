"""Our re-implementations of the rank solvers of published systems, for comparison. The rest of foremoe does not need them."""
