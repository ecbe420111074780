package testkit

import "testing"

// Slow marks a test that takes more than about two seconds, by the clock or of a processor. With
// -short, and so in make test, it is skipped.
func Slow(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("slow: make check runs it, as does go test without -short")
	}
}

// Docs marks a test of what the documents say. With -short it is skipped; make docs runs it, which finds it by its
// name.
func Docs(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("about the documents: make docs runs it, as does go test without -short")
	}
}
