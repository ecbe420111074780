// Package integrations shows tenure in programs that use other libraries.
package integrations

import "testing"

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
