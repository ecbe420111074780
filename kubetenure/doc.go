// Package kubetenure keeps leases as Lease objects of the Kubernetes API, for replicas that share
// nothing but the API server.
//
//	store, err := kubetenure.New(kubetenure.Config{}) // in a pod
//	err = store.Migrate(ctx)
//	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "sweeper"}})
//
// Everything else is as on any store of package tenure. An object's version, and with it a
// fencing token, is the resourceVersion of its Lease. Every change is an event of a watch, so
// standbys are woken by it and read nothing while the holder renews. No clock of Kubernetes is read:
// a standby takes over when it has itself seen no change for the TTL, see [tenure.Observed]. The
// store keeps no names, see [tenure.Nameless], and it fences no writes: see the module's README.
//
// Candidates of client-go's leaderelection may use the same Lease. Neither side takes it from the
// other before it has expired by the rules of both.
package kubetenure
