"""What a program is, before it is compiled: its operations, arguments, products and residuals."""
