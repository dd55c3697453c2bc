"""What `profile` measures, one module per subcommand."""
