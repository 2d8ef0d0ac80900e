"""Local search for placements of a row with a lower price."""
