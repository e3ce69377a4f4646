"""What a compiler says of a program, read."""
