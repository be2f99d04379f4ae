"""The command line: flags become a Config, which goes to the app. One file per command, no logic."""
