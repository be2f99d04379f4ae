"""One file per kind of artifact, each behind ``inferd.predict.runtime.Runtime``, imported only when a model needs
it."""
