"""A store of checkpoints: what is needed to go on with a request after its worker has died.

A checkpoint lies under its request's id in one entry of one key. Whoever runs the request holds a
*lease* on it and a *fence*, a number that grows with every owner: what an older owner writes is
refused, so one that was taken for dead and comes back changes nothing.
"""
