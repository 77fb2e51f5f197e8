"""Sockets: how messages travel. The only importer of zmq."""
