"""What the stage "requests" asks a server, and how it tells a right answer from a wrong one. Standard library."""
