"""Start the processes of a job: `trainer launch`, `trainer config`, and `notebook_launcher`."""
