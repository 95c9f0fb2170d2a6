"""The stage `export`: the merged model, its checks, its card and its manifest."""
