// Package drivers contains only tests that need drivers which the root module does not
// depend on.
package drivers
