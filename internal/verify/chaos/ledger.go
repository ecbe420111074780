package main

// Kinds of rows in the ledger. Triggers on the lease's object write when a term
// begins, when it is renewed and when its record is deleted, each in the transaction
// that does it.
const (
	ledgerBegin    = "begin"
	ledgerEnd      = "end"
	ledgerFenced   = "fenced"
	ledgerUnfenced = "unfenced"
	ledgerRenewed  = "renewed" // the note is the time in Unix milliseconds by this host's clock
	ledgerHurried  = "hurried" // an object was written by a call that had hardly any time
)

// entry is one row of the ledger.
type entry struct {
	kind  string
	lease string // of a begin and an end
	term  string
	token int64
	note  string
	at    string // when it was committed, for people
	tx    string // that wrote it; Postgres only
}

// audit is what a database has at the end of a phase: all that was committed.
type audit struct {
	ledger      []entry           // in the order of the commits
	anew        []entry           // of the file that came after one that was removed
	once        map[string]string // the objects that are created once
	registers   map[string]op     // a last get of each
	connections []string          // that outlast all replicas
	groups      bool              // leases write in groups
	fit         bool              // it is an error of the library to call the database not set up
	until       int64             // from then on nothing is promised, for the file was replaced; 0: never
}
