"""What `serve`, `chat` and `review` share: everything that happens to a connection before their own code.

settings      hosts, origins, proxies, base path and TLS of a server
run           uvicorn, in the foreground or in a thread
connection    limits on connections and on their silence
guards        access by host, origin and base path; headers of every response
bodies        limits on the size, time and form of bodies
sessions      the key of a browser's page, and the addresses that open one
requests      the page's requests: JSON in, JSON out, errors in words
streams       server-sent events, and whether the client is still there
ends          the signals that end a program
"""
