// Package kubetenure stores leases as Lease objects in the Kubernetes API, for replicas that share
// only the API server.
//
//	store, err := kubetenure.New(kubetenure.Config{}) // in a pod
//	err = store.Migrate(ctx)
//	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "sweeper"}})
//
// Everything else works as on any other store of package tenure. An object's version, and therefore
// a fencing token, is the resourceVersion of its Lease. Standbys are woken by a watch, and read
// nothing while the holder renews. The store reads no clock of Kubernetes: a standby takes over once
// it has seen no change for the TTL, as described at [tenure.ExpiryObserved]. The store has no unique
// names (see [tenure.Nameless]) and does not fence writes; the module's README describes a policy
// of the API server that does.
//
// Candidates of client-go's leaderelection can use the same Lease. Neither side takes it from the
// other before it has expired by the rules of both.
package kubetenure
