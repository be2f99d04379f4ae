"""A Ray cluster that places the nodes of models with ``placement: {nodes: ray}``.

Every replica of such a model has a reservation: an actor, for which Ray finds a machine with the cores, GPUs and memory
of one replica. The actor is a node (``agent.py``) that joins this server, so whatever follows is the one way of nodes.
``reservations.py`` decides what is asked of Ray and given back, ``placer.py`` does it, ``driver.py`` is the process that
talks to Ray, and ``actor.py`` runs in the cluster. Ray is imported by these two processes alone.
"""
