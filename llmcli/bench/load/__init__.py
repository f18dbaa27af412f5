"""Load tests of servers with OpenAI's API: send many requests in parallel, and measure how long
each request waits.
"""
