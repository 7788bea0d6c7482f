"""How to run the server on clusters. Not part of the wheel."""
