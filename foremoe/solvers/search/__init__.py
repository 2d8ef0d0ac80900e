"""Local search on the price of rows."""
