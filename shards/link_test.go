package shards_test

import (
	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

// link is a process's way to a database that other processes share.
type link struct {
	*storetest.FaultyStore
	Hinted bool // hints can be expected, as on Postgres
}

// newLink returns a link without faults.
func newLink(store tenure.Database) *link { return &link{FaultyStore: storetest.Faulty(store, nil)} }

// Watch is the store's Watch.
func (l *link) Watch(key tenure.Key) tenure.Subscription {
	watch := l.FaultyStore.Watch(key)
	if l.Hinted {
		watch = liveWatch{watch}
	}
	return watch
}

type liveWatch struct{ tenure.Subscription }

func (liveWatch) Live() bool { return true }
