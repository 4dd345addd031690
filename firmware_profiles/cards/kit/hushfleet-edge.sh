#!/bin/sh
# The command `hushfleet-edge` of the release that this board runs.
exec /opt/hushfleet/python -I /opt/hushfleet/current "$@"
