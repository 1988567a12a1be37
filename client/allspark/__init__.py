"""Client library, command line and single-machine launcher of the AllSpark fleet.

``allspark.client`` alone needs only grpcio and the contracts; everything else is imported when it is used.
"""
