"""Media, read in processes of their own and told apart by how they look."""
