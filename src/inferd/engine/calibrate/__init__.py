"""Making a quantised checkpoint: grids (``rounding``), GPTQ (``gptq``), what products see (``observe``), a model layer by
layer (``layers``), learning (``tuning``) and who learns (``student``), and the folder with its measurement (``checkpoint``)."""
