package tenure

import (
	"database/sql"
	"runtime"
	"strings"
	"sync"
	"time"
	"weak"

	"github.com/google/uuid"

	"github.com/tenurelib/tenure/internal/wake"
)

// Turns take the place of leases in a store that no other process can reach, see [Traits]: at any time
// at most one coordinator of a key has a term, and when that has ended, another one begins at once. The
// zero value is ready to use. It is safe for concurrent use, and must not be copied after its first use.
type Turns struct {
	mu    sync.Mutex
	terms map[Key]*Term // that have not been released
	token int64         // the greatest one
	hub   *wake.Hub[Key]
}

// begin begins a term, or returns a [HeldError].
func (t *Turns) begin(key Key, holder string) (*Term, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if held := t.terms[key]; held != nil {
		return nil, &HeldError{Holding: Holding{Key: key, Holder: held.holder, Term: held.id, AcquiredAt: held.acquiredAt, Version: held.token}}
	}
	if t.terms == nil {
		t.terms = make(map[Key]*Term)
	}
	now := time.Now()
	t.token = max(t.token+1, now.UnixMicro())
	term := &Term{key: key, id: uuid.NewString(), holder: holder, token: t.token, acquiredAt: now}
	t.terms[key] = term
	return term, nil
}

// end releases a term, and wakes the coordinators that wait for it.
func (t *Turns) end(term *Term) {
	if t == nil { // the term is of another store
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.terms[term.key] == term {
		delete(t.terms, term.key)
		t.watches().Wake(term.key)
	}
}

func (t *Turns) watch(key Key) Subscription {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.watches().Watch(key)
}

// watches returns whom a released term wakes. The caller holds the mutex.
func (t *Turns) watches() *wake.Hub[Key] {
	if t.hub == nil {
		t.hub = wake.NewHub[Key](true)
	}
	return t.hub
}

// turnsIn has the turns of each table of a database that this process uses alone, because a program may
// make several stores in one database.
var turnsIn = struct {
	sync.Mutex
	of map[turnsKey]*Turns
}{of: make(map[turnsKey]*Turns)}

type turnsKey struct {
	db    weak.Pointer[sql.DB]
	table string
}

// turnsOf returns the turns of a table in a database.
func turnsOf(db *sql.DB, table string) *Turns {
	key := turnsKey{weak.Make(db), strings.ToLower(table)} // names of tables are equal in any case
	turnsIn.Lock()
	defer turnsIn.Unlock()
	turns := turnsIn.of[key]
	if turns == nil {
		turns = new(Turns)
		turnsIn.of[key] = turns
		runtime.AddCleanup(db, func(key turnsKey) {
			turnsIn.Lock()
			defer turnsIn.Unlock()
			delete(turnsIn.of, key)
		}, key)
	}
	return turns
}
