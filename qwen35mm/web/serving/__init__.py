"""The page's server: people, requests and streams."""
