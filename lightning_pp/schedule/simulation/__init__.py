"""What a program takes and holds, given what its actions cost."""
