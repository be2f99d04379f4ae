"""The classic claims of inference servers, each measured against its baseline on this machine."""
