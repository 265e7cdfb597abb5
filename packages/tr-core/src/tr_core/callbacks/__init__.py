"""The callbacks that come with the loop, one a file."""
