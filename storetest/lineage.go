package storetest

import (
	"context"
	"crypto/rand"
	"maps"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

// lineage is the place of a [Mem] in the history of its database.
type lineage struct {
	server   string
	mark     string    // empty: no store has looked since the fork
	markedAt time.Time // zero: nothing can have been lost
}

func firstLineage() lineage { return lineage{server: rand.Text(), mark: rand.Text()} }

// Lineage returns the zero Lineage unless the field Lineages is set.
func (m *Mem) Lineage(ctx context.Context) (tenure.Lineage, error) {
	if !m.Lineages {
		return tenure.Lineage{}, nil
	}
	if err := ctx.Err(); err != nil {
		return tenure.Lineage{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.lineage.mark == "" {
		m.lineage.mark, m.lineage.markedAt = rand.Text(), m.now()
	}
	is := tenure.Lineage{Server: m.lineage.server, Mark: m.lineage.mark, Age: objects.SettledAge, Seen: objects.SettledAge}
	if !m.lineage.markedAt.IsZero() {
		is.Age = m.now().Sub(m.lineage.markedAt)
		is.Seen = is.Age
	}
	return is, nil
}

// Fork returns a store with the present content of this one, in another lineage. It is like a
// standby that has received no more than that, and is promoted when it is first used. What is
// written to this store afterwards is lost to processes that move to the other one, which they may
// do one by one.
func (m *Mem) Fork() *Mem {
	m.mu.Lock()
	defer m.mu.Unlock()
	forked := NewMem()
	forked.Now, forked.Lineages, forked.Events = m.Now, true, m.Events
	forked.objects, forked.version, forked.lineage = maps.Clone(m.objects), m.version, lineage{server: rand.Text()}
	return forked
}

// Restart makes later calls reach a different server, in the same lineage.
func (m *Mem) Restart() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lineage.server = rand.Text()
}
