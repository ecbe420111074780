-- Who owns what: a session, whose record is one of the objects, or nobody if that column is
-- NULL. A row outlives its owner, so its tokens increase.
CREATE TABLE IF NOT EXISTS {claims} (
    kind    text   NOT NULL,
    id      text   NOT NULL,
    session text,
    token   bigint NOT NULL,
    wanted  boolean NOT NULL DEFAULT false, -- somebody asks the owner to give it back; the next owner was not asked
    PRIMARY KEY (kind, id)
);
-- Not unique, because then a claim would wait for whoever has a foreign key to its row.
CREATE INDEX IF NOT EXISTS {claims_by_session} ON {claims} (session, kind, id);
-- Few rows are wanted, so an owner of a million finds them at once.
CREATE INDEX IF NOT EXISTS {claims_wanted} ON {claims} (session, kind, id) WHERE wanted;
