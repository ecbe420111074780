package claims_test

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

// backup is the content of the tables at some time.
type backup struct {
	records []tenure.Object
	rows    []objects.Claim
}

// backUp copies the tables. The caller holds the mutex, as for restore.
func (d *memDB) backUp() (b backup) {
	b.records, _ = d.records.List(context.Background(), objects.SessionType, "", 1<<30)
	slices.SortFunc(b.records, func(x, y tenure.Object) int { return cmp.Compare(x.Version, y.Version) })
	for _, r := range d.rows {
		b.rows = append(b.rows, r.Claim)
	}
	return b
}

// restore ends all transactions and replaces the content of the tables.
func (d *memDB) restore(b backup) {
	d.epoch++
	d.records = d.newRecords().Fork() // in another lineage
	for _, o := range b.records {
		d.records.Now = func() time.Time { return time.UnixMicro(o.Version) }
		if _, err := d.records.PutIf(context.Background(), o, tenure.IfAbsent()); err != nil {
			panic(err)
		}
	}
	d.marked = time.Time{}
	d.records.Now, d.records.Lineages = d.now, d.lineages
	clear(d.rows)
	clear(d.wanted)
	for _, c := range b.rows {
		d.rows[rowKey{c.Kind, c.ID}] = &memRow{Claim: c}
	}
}
