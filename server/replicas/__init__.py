"""Replicas of the HTTP application on Ray Serve: gateway, routing, replicas, and the commands that they share."""
