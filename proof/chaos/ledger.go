package main

// Kinds of rows in the ledger. Triggers on the lease's object add a row when a term
// begins, when it is renewed and when its record is deleted, in the same transaction.
const (
	ledgerBegin    = "begin" // or its record was written again, after a failover had lost that; on Postgres the note is as below
	ledgerEnd      = "end"
	ledgerFenced   = "fenced"
	ledgerUnfenced = "unfenced"
	ledgerRenewed  = "renewed"  // the note is the time in Unix milliseconds by this host's clock
	ledgerRestored = "restored" // the server has what a snapshot had: no term stands, but the record of this one may be deleted
	ledgerHurried  = "hurried"  // an object was written by a call with hardly any time
	ledgerVersion  = "version"  // any write of a lease's record; the note is a [recordWrite]

	// Of the claims on the keys that have a func.
	ledgerClaimBegin  = "claim begin"
	ledgerClaimEnd    = "claim end"
	ledgerClaimFenced = "claim fenced"

	// Of the rows that the replicas work on. The note of a beginning is how often the row was taken.
	ledgerRowBegin  = "row begin"
	ledgerRowFree   = "row free"
	ledgerRowDone   = "row done"
	ledgerRowEffect = "row effect" // what was written with the row's end

	// ledgerWrong is what must never be committed. Triggers on all claims and rows write it.
	ledgerWrong = "wrong"
)

// entry is one row of the ledger.
type entry struct {
	kind  string
	lease string // of a beginning or an end of a term
	term  string
	token int64
	note  string
	at    string // when it was committed, as text
	tx    string // the transaction that wrote it; Postgres only
}

// audit is a database's content at the end of a phase: everything that was committed.
type audit struct {
	ledger      []entry           // in the order of the commits
	replaced    []entry           // the ledger of the file that replaced the removed one
	once        map[string]string // payloads of the objects that are created once
	registers   map[string]op     // the result of a last get of each
	connections []string          // connections that are still open after all replicas have ended
	groups      bool              // writes of leases are grouped
	versions    bool              // the ledger has each version of the leases' records
	lost        []span            // what was acknowledged in these periods may be gone
	fit         bool              // the database is set up, and the library must not report otherwise
	revived     map[string]string // the terms of the records that a restored snapshot brought back, by lease
	until       int64             // nothing is promised from then on, because the file was replaced; 0 if it was not
}
