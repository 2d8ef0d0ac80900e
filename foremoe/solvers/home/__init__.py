"""Level home: experts to home slots."""
