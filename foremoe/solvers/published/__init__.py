"""Rank solvers of published systems, made again from their papers and code; nothing of ours needs them."""
