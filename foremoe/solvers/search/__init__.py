"""Local search for rows with a lower price."""
