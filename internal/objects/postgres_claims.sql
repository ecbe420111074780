-- Who owns what: a session, whose record is one of the objects, or nobody if that column is
-- NULL. A row outlives its owner, so its tokens increase.
CREATE TABLE IF NOT EXISTS {claims} (
    kind    text   NOT NULL,
    id      text   NOT NULL,
    session text,
    token   bigint NOT NULL,
    PRIMARY KEY (kind, id)
);
-- Not unique, because then a claim would wait for whoever has a foreign key to its row.
CREATE INDEX IF NOT EXISTS {claims_by_session} ON {claims} (session, kind, id);
-- For those that are deleted because nobody has claimed them for long.
CREATE INDEX IF NOT EXISTS {claims_by_age} ON {claims} (token) WHERE session IS NULL;
-- Which claims somebody asks for. They are not part of the rows above, which fenced writes lock:
-- as long as such writes overlap, no row could be marked.
CREATE TABLE IF NOT EXISTS {requests} (
    session text   NOT NULL,
    kind    text   NOT NULL,
    id      text   NOT NULL,
    token   bigint NOT NULL,
    PRIMARY KEY (session, kind, id, token)
);
