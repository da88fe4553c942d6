"""The commands of the command line, one a file. Heavy modules are imported when a command runs, not before."""
