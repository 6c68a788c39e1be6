"""One kit for every front: what `serve`, `chat` and `review` do with a connection before their own code sees it.

settings      hosts, origins, proxies, base path and TLS of a front
run           uvicorn, in the foreground or in a thread
connection    limits of connections, and of silence on them
guards        who is let in: hosts, origins, base path; headers of every answer
bodies        how much of a body is read, for how long, and as what
sessions      the key of a browser's page, and the addresses that open one
requests      the page's requests: JSON in, JSON out, errors in words
streams       server-sent events, and whether the client is still there
ends          the signals that end a program
"""
