"""What is made from a trace once it is recorded. Nothing in here needs torch or Lightning."""
