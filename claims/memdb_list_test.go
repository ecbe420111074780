package claims_test

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/objects"
)

// memTable is the database as a table of claims, whose List is another.
type memTable struct{ *memDB }

var _ claims.Table = memTable{}

func (d memTable) List(_ context.Context, kinds []string, _ time.Duration) (list []objects.Claim, at time.Time, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range d.rows {
		if _, stands := d.record(r.Session); stands && slices.Contains(kinds, r.Kind) {
			list = append(list, r.Claim)
		}
	}
	if len(list) == 0 {
		return nil, time.Time{}, nil
	}
	return list, d.now(), nil
}

func (d *memDB) Forget(_ context.Context, kind string, _ time.Duration) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for k, r := range d.rows {
		if k.kind == kind && r.Session == "" && !r.isLocked() {
			delete(d.rows, k)
		}
	}
	return nil
}

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
	d.records = d.newRecords()
	for _, o := range b.records {
		d.records.Now = func() time.Time { return time.UnixMicro(o.Version) }
		if _, err := d.records.PutIf(context.Background(), o, tenure.MustCreate()); err != nil {
			panic(err)
		}
	}
	d.records.Now = d.now
	clear(d.rows)
	for _, c := range b.rows {
		d.rows[rowKey{c.Kind, c.ID}] = &memRow{Claim: c}
	}
}
